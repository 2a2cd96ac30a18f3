"""The learned reward in other libraries: Gymnasium and Stable-Baselines3; see `guerdon.wrappers`."""
