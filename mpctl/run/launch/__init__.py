"""Launches a legal plan: checks it, prepares files, starts and watches the ranks, reports."""
