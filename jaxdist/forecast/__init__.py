"""Forecast a step's cost on devices that need not be here, and find the fastest mesh. Nothing is sent or compiled."""
