"""Environments: what agents see and do there, and how batches of steps are collected."""
