"""lmgeom.mixers"""
