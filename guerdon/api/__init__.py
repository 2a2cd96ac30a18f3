"""The Python API: `import guerdon as gd`. A module a subject; `guerdon/__init__.py` lists the names."""
