"""Engines that take messages and return text. They can be evaluated, not trained."""
