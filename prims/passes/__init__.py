"""Passes over prims graphs: Graph -> Graph, each a small algebra or a form that serves a target better."""
