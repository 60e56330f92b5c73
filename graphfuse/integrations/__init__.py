"""graphfuse inside other libraries, each of which is imported only when its integration is used."""
