"""`python -m bench.gateway [--quick] [--json]`"""

from bench.gateway import main

main()
