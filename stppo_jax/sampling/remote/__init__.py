"""Engines that other processes run, and a small server of our own."""
