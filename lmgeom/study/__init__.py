"""lmgeom.study"""
