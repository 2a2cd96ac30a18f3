"""guerdon.store"""
