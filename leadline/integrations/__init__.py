"""leadline inside the trainers of others. Each module needs what it integrates with, and imports it itself."""
