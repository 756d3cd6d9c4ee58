"""The choice of active units: recording what is active, learning to predict it, attaching the choice to a model."""
