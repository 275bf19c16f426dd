"""The learner: a pure function of (checkpoint, sequence of batches), and the publisher of the policy's weights."""
