"""lmgeom.lm"""
