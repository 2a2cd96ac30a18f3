"""The embedded environment: a gripper, a cube and a goal on a table, drawn without a GPU."""
