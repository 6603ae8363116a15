"""The parts of the example train_code_lm.py: data, model, training, comparison, plot."""
