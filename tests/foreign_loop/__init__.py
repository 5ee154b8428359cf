"""Tests of followed training loops."""
