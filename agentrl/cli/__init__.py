"""The command line. Modules here import the rest of the package inside their commands only."""
