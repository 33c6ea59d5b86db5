"""What `import stepscope` offers: the verbs of the command line as functions, whose results show themselves."""
