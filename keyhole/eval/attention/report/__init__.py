"""What the lines of the suite show.

summary     means and intervals of the stored lines
table       what is printed
pictures    curves
page        tables and curves in one HTML file
"""
