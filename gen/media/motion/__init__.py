"""Motions of a skeleton: kinematics, features, BVH files."""
