"""lmgeom.data"""
