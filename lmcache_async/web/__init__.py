"""The endpoint that shows how an engine or a daemon does: a page, its figures as JSON, metrics."""
