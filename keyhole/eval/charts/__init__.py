"""Pictures of documents, memory plans and pages."""
