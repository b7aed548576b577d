"""Settings that all tests share."""

from hypothesis import settings

settings.register_profile("lmgeom", deadline=None)  # a busy machine is no error
settings.load_profile("lmgeom")
