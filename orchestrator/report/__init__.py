"""What a run achieved, as `report.json` and one HTML page."""
