"""guerdon.config"""
