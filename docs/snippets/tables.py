from sklearn.datasets import load_diabetes
from sklearn.model_selection import train_test_split

from mcbn.sklearn import MCBNRegressor

x, y = load_diabetes(return_X_y=True)
x_train, x_test, y_train, y_test = train_test_split(x, y, random_state=0)

model = MCBNRegressor(random_state=0).fit(x_train, y_train)
mean, std = model.predict(x_test, return_std=True)
low, high = model.predict_interval(x_test, 0.9)

print(f"R2 {model.score(x_test, y_test):.2f}; first row {mean[0]:.0f} ± {std[0]:.0f}, true {y_test[0]:.0f}")
print(f"inside the 90 % interval: {((low < y_test) & (y_test < high)).mean():.0%} of {len(y_test)}")
