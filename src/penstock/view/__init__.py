"""The dashboard: run folders, pools and evaluations as live pages in a browser. It reads only."""
