"""Tests of `jshard/_report`: a plan as text, HTML, Markdown, DOT, traces."""
