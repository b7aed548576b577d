"""lmgeom.lev"""
