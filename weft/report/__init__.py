"""Run records as tables; reads records only."""
