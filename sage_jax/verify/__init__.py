"""Verdicts on maths answers and on untrusted programs; no jax anywhere below here."""

from sage_jax.verify.code import extract_code, reference_tests
from sage_jax.verify.pool import Verifier
from sage_jax.verify.sandbox import IsolationError
from sage_jax.verify.verdict import Job, Verdict

__all__ = ["IsolationError", "Job", "Verdict", "Verifier", "extract_code", "reference_tests"]
