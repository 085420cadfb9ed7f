"""Run folders, and the records in them: every raw value, and everything needed to judge or repeat a run."""
