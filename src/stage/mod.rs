//! What a run strings together: rejection fine-tuning, reinforcement learning, evaluation.
