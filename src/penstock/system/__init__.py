"""The operating system, used in one way by all: files, locks, child processes, asyncio tools."""
