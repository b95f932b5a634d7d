"""Passes over a traced step: small rule tables, each tested alone."""
