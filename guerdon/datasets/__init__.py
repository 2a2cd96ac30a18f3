"""guerdon.datasets"""
