"""The graph itself: operators and variables, the trees and sizes around them, and the checks that it is valid."""
