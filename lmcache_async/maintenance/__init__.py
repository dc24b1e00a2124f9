"""Stored records without an engine: inspect, verify, gc, copy, warm."""
