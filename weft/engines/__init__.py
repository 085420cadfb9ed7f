"""Engines start ranks somewhere and bring back what each returned."""
