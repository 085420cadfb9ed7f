"""Scripts of users, which run when they are imported: pytest is not to look for doctests in them."""

from pathlib import Path

collect_ignore = [file.name for file in Path(__file__).parent.glob("*.py") if not file.name.startswith("test_")]
