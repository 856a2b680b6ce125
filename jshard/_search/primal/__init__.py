"""Answers: a core and an assignment in, an assignment of lower cost out."""
