"""A graph written down: as text, as a drawing, as a folder that can be read back."""
