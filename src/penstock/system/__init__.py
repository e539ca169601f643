"""What every room needs of the machine: files, locks, processes, asyncio tools."""
