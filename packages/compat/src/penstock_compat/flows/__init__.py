"""What flows are made of; authors import them from `penstock_compat.flow`."""
