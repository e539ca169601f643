"""What training and evaluation share of a run: its folder, its inputs, its checks, and how its parts are opened."""
