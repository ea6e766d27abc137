"""Reports: reads run directories, and shows runs and their problems."""
