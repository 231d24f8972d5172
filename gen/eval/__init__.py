"""Evaluation of job folders: metrics, their statistics by shard, and the modality's checker."""
