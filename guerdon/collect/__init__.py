"""guerdon.collect"""
