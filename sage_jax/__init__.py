"""Self-evolving LLM reasoning in JAX: four roles, one backbone, verified rewards."""

__version__ = "0.1.0"
