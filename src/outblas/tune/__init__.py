"""Searching for the fastest kernels, and building the library that is published from what is found."""
