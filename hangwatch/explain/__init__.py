"""Dumps that people already have: whose stacks are these?"""
