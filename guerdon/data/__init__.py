"""Labelled experience: formats on disk, data sets made of them, and what collects it."""
